from django.contrib import admin

from .models import Invoice, Sale


@admin.register(Sale)
class SaleAdmin(admin.ModelAdmin):
    list_display = ("day", "amount")
    date_hierarchy = "day"


@admin.register(Invoice)
class InvoiceAdmin(admin.ModelAdmin):
    list_display = ("__str__", "amount", "sent_at")
